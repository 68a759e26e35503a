"""What a rule of the answer costs: output tokens/s with and without one for every row.

    python benchmarks/structured_outputs.py [MODEL] [--rows 64] [--output-len 256] [--rounds 3]

MODEL is a shape by name (see parts/model_shapes.py) or what `pagemesh serve` takes; every setting
is a flag. All rows begin together, and every answer has as many tokens: the rules are such as no
answer ends, so that a step has the same rows throughout.
Rounds alternate between the kinds; the first of each is left out.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import defaultdict
from statistics import median
from typing import Any, Final

from parts.shape_args import parse_shape_args

from pagemesh.bench.engine import offline_llm
from pagemesh.bench.workloads import fixed
from pagemesh.llm import LLM
from pagemesh.shared.sampling import SamplingParams
from pagemesh.shared.structured_outputs import StructuredOutputsParams

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ENDLESS: Final = 100_000
SCHEMA: Final = StructuredOutputsParams(
    json={"type": "array", "items": PERSON, "minItems": ENDLESS}
)
REGEX: Final = StructuredOutputsParams(regex="([a-z]+ )*[0-9]{9999}")
KINDS: Final[dict[str, StructuredOutputsParams | None]] = {
    "free": None,
    "schema": SCHEMA,
    "regex": REGEX,
}


def add_options(group: Any) -> None:
    add = group.add_argument
    add("--rows", type=int, default=64, metavar="N", help="requests at a time")
    add("--input-len", type=int, default=128, metavar="N", help="prompt tokens of a request")
    add("--output-len", type=int, default=256, metavar="N", help="output tokens of a request")
    add("--rounds", type=int, default=3, metavar="N", help="measured runs of each kind")


def main() -> None:
    args, settings = parse_shape_args("structured_outputs", __doc__ or "", add_options)
    llm = offline_llm(settings)
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for round_ in range(args.rounds + 1):
        for kind, rule in KINDS.items():
            rate = _run(llm, args, rule, salt=f"{kind}-{round_}")
            if round_ > 0:
                rates[kind].append(rate)
    for kind, values in rates.items():
        part = median(values) / median(rates["free"])
        shown = "  ".join(f"{value:.0f}" for value in values)
        print(f"{kind:8s} {median(values):9.1f} tok/s  {part:6.1%} of free  ({shown})")


def _run(llm: LLM, args: Namespace, rule: StructuredOutputsParams | None, salt: str) -> float:
    """Output tokens a second of one run."""
    workload = fixed(args.rows, args.input_len, args.output_len, 0, salt=salt)
    workload = workload.within(llm.card.vocab_tokens)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=args.output_len,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=rule,
        )
        for seed in range(args.rows)
    ]
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in workload.prompts]
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - began_s
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if tokens != args.rows * args.output_len:
        raise SystemExit(f"answers ended early: {tokens} of {args.rows * args.output_len} tokens")
    return tokens / elapsed_s


if __name__ == "__main__":
    main()
