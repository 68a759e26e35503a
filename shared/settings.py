"""The settings tree: the one schema behind YAML files, flags, PAGEMESH_* and the documentation.

Leaf names are unique over the whole tree, so `max_num_seqs` is the flag `--max-num-seqs`, the
variable `PAGEMESH_MAX_NUM_SEQS`, the keyword of `LLM(max_num_seqs=…)`, and the YAML key, at the
top level or under its section. `shared/settings_sources.py` reads the sources into this tree.
"""

from __future__ import annotations

import re
import socket
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pagemesh.shared.errors import SettingsError

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
MAX_RUN_AHEAD_STEPS = 8
"""Most steps that a scheduler has out before it knows their results."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+/?", re.IGNORECASE)
Count = Annotated[int, Meta(ge=1)]
MaxModelLen = Count | Literal["auto"]


def _meta(help_text: str, *, day_one: bool = False, secret: bool = False) -> Meta:
    return Meta(description=help_text, extra={"day_one": day_one, "secret": secret})


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[
        str,
        _meta(
            "What to serve: a folder, a .gguf file, a Hub id, or a built-in name "
            "(smollm2-135m-instruct)",
            day_one=True,
        ),
    ] = "smollm2-135m-instruct"
    served_model_name: Annotated[
        list[str], _meta("Names clients may use; default: the model's own name", day_one=True)
    ] = []
    models: Annotated[
        list[str],
        _meta(
            "Several models in one mesh, each as MODEL or NAME=MODEL; a worker serves the one that "
            "--model names"
        ),
    ] = []
    revision: Annotated[str | None, _meta("Hub revision (branch, tag or commit)")] = None
    tokenizer: Annotated[str | None, _meta("Take the tokenizer from this folder or Hub id")] = None
    chat_template: Annotated[
        str | None, _meta("A Jinja file, or the template itself, replacing the model's own")
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "deepseek", "hermes", "json", "llama3_json", "mistral", "pythonic"],
        _meta("How the model writes tool calls; auto: as its chat template says"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "mistral", "think"],
        _meta("Tags around the model's reasoning: <think> or Mistral's; auto: as its template"),
    ] = "auto"
    generation_config: Annotated[
        str,
        _meta(
            "Sampling parameters for requests that bring none; auto: those of the model's "
            "generation_config.json, vllm: none but pagemesh's own, or a folder with such a file"
        ),
    ] = "auto"
    pooling: Annotated[
        Literal["mean", "last"],
        _meta("What an embedding is made of: the mean of all tokens' hidden states, or the last's"),
    ] = "mean"
    trust_remote_code: Annotated[
        bool, _meta("Run Python code that ships with the model's tokenizer or config")
    ] = False
    load_format: Annotated[
        Literal["auto", "dummy"], _meta("dummy: random weights, for speed tests")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        _meta("Type of weights and KV cache; auto is bfloat16"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        _meta("Keep the weights as 8-bit integers, with a scale for each output (CPU only)"),
    ] = "none"
    max_model_len: Annotated[
        MaxModelLen,
        _meta(
            "Longest prompt plus answer, in tokens; auto: the model's, lowered to what fits",
            day_one=True,
        ),
    ] = "auto"
    cache_dir: Annotated[str, _meta("Where models are kept")] = "~/.cache/pagemesh"


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[int, _meta("Tokens per KV block"), Meta(ge=1, le=256)] = 16
    gpu_memory_utilization: Annotated[
        float,
        _meta(
            "Share of the device's memory that one worker may take (GPU only; on a CPU set "
            "--kv-cache-memory)",
            day_one=True,
        ),
        Meta(gt=0, le=1),
    ] = 0.9
    kv_cache_memory: Annotated[
        str | None,
        _meta(
            "Size of the KV pool, such as 512MiB or 2GiB; default on a GPU: what "
            "--gpu-memory-utilization leaves, on a CPU: 25% of available memory, at most 1GiB",
            day_one=True,
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, _meta("Reuse the KV blocks of common prefixes")] = True


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        _meta("Most requests in one step; default: 512 on a GPU, 256 on a CPU", day_one=True),
    ] = None
    max_num_batched_tokens: Annotated[
        Count | None,
        _meta("Token budget of one step; default: 8192 on a GPU, 512 on a CPU", day_one=True),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, _meta("Split long prompts over steps (off needs a budget of at least max_model_len)")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], _meta("Order of the waiting queue")
    ] = "fcfs"
    max_waiting: Annotated[
        int, _meta("Most requests waiting in one engine; more are answered 429"), Meta(ge=1)
    ] = 2048
    max_waiting_tokens: Annotated[
        int,
        _meta("Most prompt tokens of the requests waiting in one engine; more are answered 429"),
        Meta(ge=1),
    ] = 16_777_216
    queue_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _meta("Longest a request may wait for its first step, then 503; default: for ever"),
    ] = None
    run_ahead_depth: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_RUN_AHEAD_STEPS)] | None,
        _meta("Steps out before their tokens are known; default: 2, or 3 if they take under 2 ms"),
    ] = None
    watermark: Annotated[
        float,
        _meta("Share of blocks kept free when admitting beside running requests"),
        Meta(ge=0, lt=1),
    ] = 0.01


class ParallelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tensor_parallel_size: Annotated[int, _meta("Devices one worker group spans"), Meta(ge=1)] = 1
    device: Annotated[Literal["auto", "cpu", "cuda"], _meta("Where the worker computes")] = "auto"
    threads: Annotated[
        Count | None, _meta("CPU threads of the worker; default: the cores it may use")
    ] = None
    enforce_eager: Annotated[
        bool, _meta("Launch a GPU's decode steps kernel by kernel instead of as CUDA graphs")
    ] = False


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, _meta("Address the gateway listens on", day_one=True)] = "127.0.0.1"
    port: Annotated[
        int, _meta("Port the gateway listens on", day_one=True), Meta(ge=0, le=65535)
    ] = 8000
    api_key: Annotated[
        list[str], _meta("Keys clients must send as Bearer tokens", day_one=True, secret=True)
    ] = []
    admin_key: Annotated[
        list[str],
        _meta("Keys of administrators' routes (/admin/…), closed without one", secret=True),
    ] = []
    allow_unauthenticated: Annotated[
        bool, _meta("Let a host other than loopback listen without an API key")
    ] = False
    allowed_origins: Annotated[
        list[str],
        _meta("Web pages that may call (CORS), such as https://chat.example.com; * is any"),
    ] = msgspec.field(default_factory=lambda: ["*"])
    ssl_certfile: Annotated[str | None, _meta("TLS certificate chain (PEM)")] = None
    ssl_keyfile: Annotated[str | None, _meta("TLS private key (PEM)")] = None
    max_body_bytes: Annotated[int, _meta("Largest request body"), Meta(ge=1024)] = 32 * 2**20
    request_timeout_s: Annotated[
        float, _meta("How long a request may wait for an engine to appear"), Meta(gt=0)
    ] = 30.0
    routes: Annotated[
        dict[str, str | dict[str, float]],
        _meta(
            "Further names for models, NAME=MODEL, and weighted splits, NAME=A:0.9,B:0.1; "
            "/admin/routes changes them at run time"
        ),
    ] = {}
    files_dir: Annotated[
        str | None,
        _meta(
            "Where /v1/files and /v1/batches keep what is theirs: a folder that all gateways "
            "of the mesh share; default: a folder in data_dir, of this mesh_name and port"
        ),
    ] = None
    max_file_bytes: Annotated[int, _meta("Largest file that is kept"), Meta(ge=1024)] = 200 * 2**20
    max_files_bytes: Annotated[
        int,
        _meta("Most that the files and batches of one API key may take together"),
        Meta(ge=1024),
    ] = 2 * 2**30
    files_ttl_s: Annotated[
        float, _meta("How long files and ended batches are kept, at most"), Meta(gt=0)
    ] = 30 * 24 * 3600.0
    batch_concurrency: Annotated[
        Count,
        _meta("Most requests of batches that one gateway has out; a quarter beside other requests"),
    ] = 64
    trust_request_chat_template: Annotated[
        bool,
        _meta(
            "Render the chat templates that requests bring (chat_template), in a sandbox that does "
            "not bound their time and memory: only where clients are trusted"
        ),
    ] = False
    seed: Annotated[
        int | None,
        _meta("Seed of the seeds drawn for requests that bring none; default: random"),
    ] = None
    response_ttl_s: Annotated[
        float, _meta("How long a response is kept after its last use"), Meta(ge=1)
    ] = 2_592_000.0
    max_response_bytes: Annotated[
        int,
        _meta("Largest response, its input included, that is kept"),
        Meta(ge=1024),
    ] = 4 * 2**20
    max_stored_bytes: Annotated[
        int,
        _meta("Most bytes of responses that the mesh keeps; beyond, the least used go"),
        Meta(ge=1024),
    ] = 128 * 2**20
    max_background_responses: Annotated[
        int,
        _meta("Most responses that one gateway runs in the background; more are answered 429"),
        Meta(ge=0),
    ] = 256
    drain_notice_s: Annotated[
        float,
        _meta(
            "How long a gateway still takes requests after SIGTERM, while /ready says no, for a "
            "balancer to notice; part of drain_timeout_s"
        ),
        Meta(ge=0),
    ] = 0.0


class MeshSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    redis_url: Annotated[
        str | None,
        _meta(
            "redis:// or rediss:// (TLS) URL of the registry, with ?ssl_ca_certs=FILE for a CA of "
            "one's own; default: an embedded Valkey"
        ),
    ] = None
    data_dir: Annotated[
        str,
        _meta("What is kept on this machine: files, and an embedded Valkey's responses and routes"),
    ] = "~/.local/share/pagemesh"
    mesh_name: Annotated[str, _meta("Prefix of this mesh's keys in Redis")] = "pagemesh"
    mesh_secret: Annotated[
        str,
        _meta(
            "Shared secret of the links between services; needed when service_host is not loopback",
            secret=True,
        ),
    ] = ""
    mesh_certfile: Annotated[
        str | None, _meta("TLS on the links between services: certificate chain of a service (PEM)")
    ] = None
    mesh_keyfile: Annotated[str | None, _meta("Private key of mesh_certfile (PEM)")] = None
    mesh_cafile: Annotated[
        str | None,
        _meta("The mesh's own CA (PEM): who has a certificate from it may open links"),
    ] = None
    gateways: Annotated[
        Count, _meta("Gateways that pagemesh serve starts; they share the port (SO_REUSEPORT)")
    ] = 1
    tokenizers: Annotated[Count, _meta("Tokenizer services that pagemesh serve starts")] = 1
    schedulers: Annotated[
        Count, _meta("Schedulers that pagemesh serve starts; they share the workers evenly")
    ] = 1
    workers: Annotated[
        Count,
        _meta(
            "Workers that pagemesh serve starts for each model: a GPU for each, or equal shares of "
            "the CPU"
        ),
    ] = 1
    autoscale: Annotated[
        str | None,
        _meta(
            "MIN:MAX, for pagemesh serve: start and stop workers by load, instead of --workers; "
            "each has the share of the machine that it would have among MAX"
        ),
    ] = None
    scale_down_after_s: Annotated[
        float,
        _meta("How long fewer workers must have been enough before fewer are asked for"),
        Meta(gt=0),
    ] = 60.0
    service_host: Annotated[str, _meta("Address inner services listen on and announce")] = (
        "127.0.0.1"
    )
    service_port: Annotated[
        int,
        _meta(
            "Port of an inner service, and a gateway's own if it shares --port with others; 0 "
            "takes a free one, as pagemesh serve must"
        ),
        Meta(ge=0, le=65535),
    ] = 0
    drain_timeout_s: Annotated[
        float, _meta("How long running requests may finish after SIGTERM"), Meta(ge=0)
    ] = 5.0
    step_timeout_s: Annotated[
        float,
        _meta(
            "How long a worker may be at one step before it is ejected and started again; never "
            "under ten times the longest step of late, and ten times as long for a step larger "
            "than any before"
        ),
        Meta(gt=0),
    ] = 60.0
    loop_timeout_s: Annotated[
        float,
        _meta("How long a service's event loop may stand still before the process ends itself"),
        Meta(gt=0),
    ] = 30.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _meta("Least severe log line shown")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "human", "json"], _meta("auto: human in a terminal, JSON otherwise")
    ] = "auto"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. Sections only group; leaf names are unique."""

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    parallel: ParallelSettings = ParallelSettings()
    gateway: GatewaySettings = GatewaySettings()
    mesh: MeshSettings = MeshSettings()
    log: LogSettings = LogSettings()


def check_settings(settings: Settings) -> None:
    """Refuse values that contradict each other, or this system. Raises SettingsError."""
    if settings.parallel.tensor_parallel_size != 1:
        raise SettingsError(
            "tensor_parallel_size must be 1: tensor parallelism is not available yet",
            key="tensor_parallel_size",
        )
    if settings.mesh.gateways > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise SettingsError(
            "gateways must be 1: this system lacks SO_REUSEPORT, by which several share a port",
            key="gateways",
        )
    _check_tls_files(settings.gateway, settings.mesh)
    _check_exposure(settings.gateway)
    _check_origins(settings.gateway)
    _check_stored(settings.gateway)
    _check_chunking(settings)


def _check_tls_files(gateway: GatewaySettings, mesh: MeshSettings) -> None:
    if (gateway.ssl_certfile is None) != (gateway.ssl_keyfile is None):
        raise SettingsError(
            "ssl_certfile and ssl_keyfile go together: set both or neither", key="ssl_certfile"
        )
    files = (mesh.mesh_certfile, mesh.mesh_keyfile, mesh.mesh_cafile)
    if None in files and any(files):
        raise SettingsError(
            "mesh_certfile, mesh_keyfile and mesh_cafile go together: set all or none",
            key="mesh_certfile",
        )


def _check_exposure(gateway: GatewaySettings) -> None:
    guarded = bool(gateway.api_key) or gateway.allow_unauthenticated
    if gateway.host not in LOOPBACK_HOSTS and not guarded:
        raise SettingsError(
            f"host {gateway.host} is reachable from other machines: set an --api-key, or "
            "--allow-unauthenticated to let anybody in",
            key="host",
        )


def _check_origins(gateway: GatewaySettings) -> None:
    for origin in gateway.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                f"allowed_origins holds {origin!r}: each is * or a page's scheme, host and port, "
                "such as https://chat.example.com",
                key="allowed_origins",
            )


def _check_stored(gateway: GatewaySettings) -> None:
    if gateway.max_response_bytes > gateway.max_stored_bytes:
        raise SettingsError(
            f"max_response_bytes ({gateway.max_response_bytes}) must be at most max_stored_bytes "
            f"({gateway.max_stored_bytes}): all responses together have that room",
            key="max_response_bytes",
        )


def check_link_exposure(mesh: MeshSettings) -> None:
    """For a service that listens for links. Raises SettingsError when anybody could open one."""
    if mesh.service_host not in LOOPBACK_HOSTS and not mesh.mesh_secret:
        raise SettingsError(
            f"service_host {mesh.service_host} is reachable from other machines: give every "
            "service of the mesh the same --mesh-secret (PAGEMESH_MESH_SECRET)",
            key="mesh_secret",
        )


def _check_chunking(settings: Settings) -> None:
    """Against a known length; the scheduler checks the length that the model brings."""
    budget, length = settings.scheduler.max_num_batched_tokens, settings.model.max_model_len
    if settings.scheduler.enable_chunked_prefill or budget is None or length == "auto":
        return
    if budget < length:
        raise SettingsError(
            f"without chunked prefill max_num_batched_tokens ({budget}) must be at least "
            f"max_model_len ({length})",
            key="enable_chunked_prefill",
        )
