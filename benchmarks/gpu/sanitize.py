"""Launch every GPU kernel at awkward shapes, for compute-sanitizer to watch.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python benchmarks/gpu/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/gpu/sanitize.py
    compute-sanitizer --tool synccheck python benchmarks/gpu/sanitize.py

Without torch's cache of memory every tensor is an allocation of its own, so that a step past its
end is one past an allocation's. A run without the tool before fills Triton's cache. `--only TEXT`
takes the calls with the text in their names. A call that fails is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch
from parts.kernel_calls import Call, kernel_calls

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run(call: Call, device: str) -> bool:
    begun_s = time.perf_counter()
    try:
        call.run()
        if device == "cuda":
            torch.cuda.synchronize()
        outcome = "ok"
    except Exception as error:
        outcome = f"FAILED: {type(error).__name__}: {error}"
    print(f"{call.name:70} {time.perf_counter() - begun_s:7.2f} s  {outcome}", flush=True)
    return outcome == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", metavar="TEXT")
    args = parser.parse_args()
    torch.manual_seed(0)
    n_failed = 0
    for call in kernel_calls(args.device, DTYPES[args.dtype]):
        if args.only in call.name:
            n_failed += not run(call, args.device)
            gc.collect()
    print(f"{n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
