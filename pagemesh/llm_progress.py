"""The progress bar of the offline class."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from pagemesh.outputs import Output


class Progress:
    """Counts finished prompts and shows tokens per second. A context manager."""

    def __init__(self, n_prompts: int, *, shown: bool) -> None:
        self._bar = tqdm(
            total=n_prompts,
            desc="Processed prompts",
            unit="prompt",
            disable=not shown,
            postfix="input 0 tokens/s, output 0 tokens/s",
        )
        self._started_s = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0

    def note(self, n_tokens: int) -> None:
        """A step generated `n_tokens`."""
        self._output_tokens += n_tokens

    def note_finished(self, output: Output) -> None:
        self._input_tokens += len(output.prompt_token_ids)
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._input_tokens / elapsed_s:.1f} tokens/s, "
            f"output {self._output_tokens / elapsed_s:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
