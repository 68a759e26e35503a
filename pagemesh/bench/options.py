"""The options of `bench serve`, named as `vllm bench serve` names them."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pagemesh.bench.datasets import Endpoint
from pagemesh.bench.statistics import GOODPUT_METRICS

DATASETS: Final = ("random", "shared-prefix", "file")


@dataclass(frozen=True)
class ServeOptions:
    """Lengths in tokens; rates per second; `goodput` in ms by metric."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 100
    seed: int = 0
    vocab_size: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    file_output_len: int = 128
    request_rate: float = math.inf
    max_concurrency: int | None = None
    clients: int | Literal["auto"] = "auto"
    num_warmups: int = 1
    request_timeout_s: float = 3600.0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    goodput: dict[str, float] = field(default_factory=dict)
    json: Path | None = None


_DEFAULTS: Final = ServeOptions()


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    _add_server_flags(parser.add_argument_group("server"))
    _add_dataset_flags(parser.add_argument_group("requests"))
    _add_load_flags(parser.add_argument_group("load"))
    result = parser.add_argument_group("result")
    _add(result, "--goodput", "limits in ms of good requests: ttft:200 tpot:50 e2el:1000",
         nargs="+", action=_Goodput, metavar="METRIC:MS")  # fmt: skip
    _add(result, "--json", "write the figures to this file", type=output_file, metavar="FILE")


def count(text: str) -> int:
    """An argparse type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def output_file(text: str) -> Path:
    """An argparse type: refused before the run rather than after it."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    _add(group, "--base-url", "address of any OpenAI-style server", metavar="URL")
    _add(group, "--endpoint", "which API to drive", choices=("completions", "chat"))
    _add(group, "--model", "default: the first of /v1/models", metavar="NAME")
    _add(group, "--api-key", "sent as a Bearer token", metavar="KEY")


def _add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    _add(group, "--dataset-name", "where prompts come from", choices=DATASETS)
    _add(group, "--dataset-path", "JSONL: prompt or messages", type=Path, metavar="FILE")
    _add(group, "--num-prompts", "requests to send", type=count)
    _add(group, "--seed", "of prompts, lengths and arrivals", type=int)
    _add(group, "--vocab-size", "draw ids below this (default: the server's, or 10000)", type=count)
    _add(group, "--random-input-len", "prompt tokens", type=count)
    _add(group, "--random-output-len", "output tokens", type=count)
    _add(group, "--random-range-ratio", "lengths vary by ± this share", type=_ratio)
    _add(group, "--prefix-repetition-prefix-len", "tokens that prompts share", type=count)
    _add(group, "--prefix-repetition-suffix-len", "tokens of their own", type=count)
    _add(group, "--prefix-repetition-num-prefixes", "different prefixes", type=count)
    _add(group, "--prefix-repetition-output-len", "output tokens", type=count)
    _add(group, "--file-output-len", "max_tokens of lines without", type=count)
    _add(group, "--ignore-eos", "generate max_tokens whatever comes", action="store_true")
    _add(group, "--temperature", "0 is greedy", type=float)
    _add(group, "--extra-body", "JSON object of more request fields", type=_object, metavar="JSON")


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    _add(group, "--request-rate", "requests a second, Poisson; inf: all at once", type=_rate)
    _add(group, "--max-concurrency", "most requests in flight", type=count)
    _add(group, "--clients", "client processes; auto: more once one is the limit", type=_clients)
    _add(group, "--num-warmups", "random requests before the measured ones", type=_whole)
    _add(group, "--request-timeout-s", "give a request up after this", type=_rate)


def _add(group: argparse._ArgumentGroup, flag: str, help_text: str, **options: Any) -> None:
    default = getattr(_DEFAULTS, flag.removeprefix("--").replace("-", "_"))
    shown = default not in (None, {}) and default is not False and "default" not in help_text
    text = f"{help_text} (default: {default})" if shown else help_text
    if "type" in options:
        options.setdefault("metavar", "N")
    group.add_argument(flag, help=text, **options)


class _Goodput(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, dict(self._limit(value) for value in values))

    def _limit(self, text: str) -> tuple[str, float]:
        name, _, limit = text.partition(":")
        if name not in GOODPUT_METRICS:
            raise argparse.ArgumentError(self, f"{text!r} is not one of ttft:MS tpot:MS e2el:MS")
        try:
            return name, float(limit)
        except ValueError as error:
            raise argparse.ArgumentError(self, f"{text!r} has no limit in ms") from error


def _clients(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else count(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else count(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = math.nan
    if not 0 <= ratio < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not in [0, 1)")
    return ratio


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
