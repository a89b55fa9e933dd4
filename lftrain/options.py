"""Options of the runtime, one frozen structure a component. Where they come from (a file, a script) is nobody's business here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field


def _doc(text: str, **limits: Any) -> Meta:
    return Meta(description=text, **limits)


MOST_SECONDS = 1e7

Above = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]


class RunOptions(Struct, frozen=True, kw_only=True):
    """The run as a whole."""

    folder: Annotated[str, _doc("folder of records and checkpoints; made if need be")]
    steps: Annotated[int, _doc("steps (updates) of the whole run, over all restarts", ge=1)]
    seed: Annotated[
        int, _doc("one seed for parameters, random numbers on all devices, and the order of the data", ge=0, le=1 << 62)
    ] = 0
    deterministic: Annotated[
        bool, _doc("only algorithms that give the same bits each time; slower on GPUs, and an error where there is none")
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], _doc("`auto`: a GPU if there is one")] = "auto"
    copy_ahead: Annotated[
        int,
        _doc(
            "batches of `lfdata.Loader` that are copied to a GPU ahead of the step that takes them (`lfdata.DeviceLoader`); 0: one step, "
            "by way of torch's pinned memory",
            ge=0,
        ),
    ] = 2
    collective_seconds: Annotated[
        float, _doc("how long a rank may wait for the others in one operation before that is an error", gt=0, le=MOST_SECONDS)
    ] = 600.0
    peer_seconds: Annotated[float, _doc("silence after which a rank is taken for dead", ge=2, le=MOST_SECONDS)] = 60.0


class PrecisionOptions(Struct, frozen=True, kw_only=True):
    """Number formats, clipping, and what happens to gradients that are not finite."""

    mode: Annotated[
        Literal["fp32", "bf16", "fp16"], _doc("`bf16`, `fp16`: autocast with fp32 weights; fp16 with a gradient scale")
    ] = "fp32"
    weights: Annotated[
        Literal["fp32", "compute"],
        _doc(
            "`compute`: weights of linear layers that are trained are stored in bf16, beside fp32 masters, which AdamW updates and checkpoints "
            "hold: the same numbers, less to move. With `bf16`, fused AdamW, one micro-batch a step; ranks add up such gradients in bf16"
        ),
    ] = "fp32"
    frozen: Annotated[
        Literal["keep", "compute", "fp8"],
        _doc(
            "`compute`: parameters that are not trained are stored in the type of `mode`; `fp8`: so too, but linear layers that are not "
            "trained multiply in float8 (e4m3), faster and less exact. GPUs from Ada and Hopper on; with `compile.blocks`"
        ),
    ] = "compute"
    clip: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        _doc("largest norm of all gradients together, after unscaling; 0 or none: no clipping"),
    ] = 1.0
    max_skips: Annotated[
        int,
        _doc(
            "steps in a row that were skipped (gradients that are not finite, or nothing in them that counts) after which the run stops",
            ge=1,
        ),
    ] = 20
    scale_init: Annotated[float, _doc("first gradient scale (fp16)", ge=1, le=2.0**127)] = 2.0**16
    scale_growth_interval: Annotated[int, _doc("good steps after which the scale doubles (fp16)", ge=1)] = 2000


class DdpOptions(Struct, frozen=True, kw_only=True):
    """Gradients between ranks."""

    bucket_mb: Annotated[float, _doc("gradients that travel together, in MB", gt=0, le=1e6)] = 25.0
    bucket_view: Annotated[bool, _doc("gradients are views of the buckets: saves one copy of them")] = True
    find_unused: Annotated[
        bool,
        _doc("look for parameters without a gradient in each step; costs a walk over the graph. Without it they are an error"),
    ] = False
    hook: Annotated[Literal["allreduce", "powersgd"], _doc("how a bucket is reduced; `powersgd` is lossy")] = "allreduce"
    powersgd_rank: Annotated[int, _doc("rank of PowerSGD's factors", ge=1)] = 4
    powersgd_start: Annotated[int, _doc("steps before PowerSGD begins", ge=2)] = 1000
    checksum_every: Annotated[int, _doc("steps between comparisons of the parameters of all ranks; 0: never", ge=0)] = 1000


class CompileOptions(Struct, frozen=True, kw_only=True):
    """torch.compile of each of `model.blocks()`."""

    blocks: Annotated[bool, _doc("compile the repeated blocks")] = False
    backend: Annotated[str, _doc("backend of torch.compile")] = "inductor"
    dynamic: Annotated[
        bool | None,
        _doc(
            "`true`: one compilation for all sizes; `false`: one a size (bucket the lengths); none: torch decides after the second"
        ),
    ] = None
    limit: Annotated[int, _doc("compilations of one piece of code; more turn the block to eager, with an event", ge=1)] = 8


class GraphOptions(Struct, frozen=True, kw_only=True):
    """CUDA graph of the whole step."""

    enabled: Annotated[bool, _doc("capture the step; falls back to eager with the reason where that cannot be")] = False
    warmup: Annotated[int, _doc("eager steps before the capture", ge=1)] = 3
    tolerance: Annotated[
        float, _doc("largest relative difference of gradients between graph and eager, checked at capture", gt=0)
    ] = 1e-3


class ActivationOptions(Struct, frozen=True, kw_only=True):
    """Which blocks are recomputed in the backward pass instead of kept."""

    mode: Annotated[
        Literal["none", "all", "budget", "torch"],
        _doc("`budget`: chosen from measured bytes and time of each block; `torch`: the memory budget of torch.compile"),
    ] = "none"
    budget_mb: Annotated[Above | None, _doc("MB that all blocks together may keep for the backward pass (`budget`)")] = None
    torch_budget: Annotated[float, _doc("part of the activations that is kept (`torch`)", ge=0, le=1)] = 0.5
    admit_mb: Annotated[
        Above | None,
        _doc(
            "MB that a micro-batch may take: one that is expected to take more, by those seen so far, is cut by rows; none: none is. Not with "
            "`graph.enabled`"
        ),
    ] = None
    limit_mb: Annotated[
        Above | None, _doc('memory of a step in MB, for `data.accumulate = "auto"`; none: 90 % of the GPU\'s')
    ] = None


class CheckpointOptions(Struct, frozen=True, kw_only=True):
    """When the run is saved, and from where it goes on."""

    every: Annotated[int, _doc("steps between checkpoints; 0: only at the end", ge=0)] = 1000
    keep: Annotated[int, _doc("how many stay", ge=1)] = 3
    asynchronous: Annotated[bool, _doc("write in the background from a copy on the host")] = True
    verify: Annotated[bool, _doc("read each back before older ones are removed")] = True
    resume: Annotated[
        Literal["auto", "never", "must"],
        _doc(
            "`auto`: from the newest sound one, from the start without one; `must`: an error without one; `never`: refuse a folder that has one"
        ),
    ] = "auto"
    allow_batch_change: Annotated[
        bool,
        _doc(
            "go on from a checkpoint of another `data.batch_size`, from the same sample, where its samples are a whole number of batches here "
            "and rows are neither packed nor in buckets; without it another size is an error"
        ),
    ] = False
    export: Annotated[bool, _doc("model.safetensors beside the last checkpoint when the run ends (extra `safetensors`)")] = (
        False
    )
    failures: Annotated[int, _doc("failed checkpoints in a row after which the run stops", ge=1)] = 3


class MetricsOptions(Struct, frozen=True, kw_only=True):
    """What is recorded."""

    every: Annotated[int, _doc("steps a line in metrics.jsonl", ge=1)] = 10
    live: Annotated[Literal["auto", "on", "off"], _doc("one line of state in the terminal; `auto`: where there is one")] = (
        "auto"
    )
    tensorboard: Annotated[bool, _doc("TensorBoard files in FOLDER/tensorboard (extra `tensorboard`)")] = False
    trace_first: Annotated[
        Number | None, _doc("first step of a trace, counted from 0 (FOLDER/trace-RANK.json, for ui.perfetto.dev)")
    ] = None
    trace_steps: Annotated[int, _doc("steps of the trace", ge=1, le=100)] = 5
    memory_every: Annotated[int, _doc("logged lines between looks at memory by owner; 0: never", ge=0)] = 1
    growth_mb: Annotated[
        float, _doc("growth of one owner of memory, over eight looks in a row that never fell, that is an event; MB", gt=0)
    ] = 64.0


class Options(Struct, frozen=True, kw_only=True):
    """All the runtime itself needs."""

    run: Annotated[RunOptions, _doc("the run as a whole")]
    precision: Annotated[PrecisionOptions, _doc("number formats and clipping")] = field(default_factory=PrecisionOptions)
    ddp: Annotated[DdpOptions, _doc("gradients between ranks")] = field(default_factory=DdpOptions)
    compile: Annotated[CompileOptions, _doc("torch.compile by block")] = field(default_factory=CompileOptions)
    graph: Annotated[GraphOptions, _doc("CUDA graph of the step")] = field(default_factory=GraphOptions)
    activations: Annotated[ActivationOptions, _doc("activation checkpointing")] = field(default_factory=ActivationOptions)
    checkpoint: Annotated[CheckpointOptions, _doc("saving and going on")] = field(default_factory=CheckpointOptions)
    metrics: Annotated[MetricsOptions, _doc("records")] = field(default_factory=MetricsOptions)


Transforms = dict[str, list[dict[str, Any]]]


class DataOptions(Struct, frozen=True, kw_only=True):
    """The training data: options of `lfdata.Loader`."""

    path: Annotated[str | list[str], _doc("data set, or several that are mixed")]
    batch_size: Annotated[int, _doc("samples of a step, over all ranks and micro-batches", ge=1)]
    fields: Annotated[
        Transforms | None,
        _doc(
            'by field, its transforms in order, as `{transform = "Resize", size = 224}`; `[]` for none. All fields by default'
        ),
    ] = None
    accumulate: Annotated[
        int | Literal["auto"], _doc("micro-batches a step; `auto`: as few as fit into memory (`activations.limit_mb`)")
    ] = 1
    shuffle: Annotated[Literal["full", "block", "sequential"], _doc("order of an epoch")] = "full"
    block: Annotated[int, _doc("rows of a block (`block`)", ge=1)] = 1024
    window: Annotated[int, _doc("blocks that are shuffled together (`block`)", ge=1)] = 16
    mixture: Annotated[dict[str, Any] | None, _doc("how several sources are mixed: weights, temperature, ...")] = None
    buckets: Annotated[dict[str, Any] | None, _doc("batches of similar lengths: field, ...")] = None
    packing: Annotated[dict[str, Any] | None, _doc("token sequences packed into rows: field, window, capacity")] = None
    batch_transforms: Annotated[list[dict[str, Any]], _doc("MixUp, CutMix or Mosaic")] = field(default_factory=list)
    bad_samples: Annotated[Literal["stop", "replace", "mask"], _doc("what a bad sample does")] = "stop"
    most_bad: Annotated[int, _doc("bad samples after which the run stops", ge=0)] = 1000
    most_bad_rate: Annotated[float, _doc("part of all rows that may be bad", ge=0, le=1)] = 0.01
    engine: Annotated[Literal["auto", "process", "thread", "inline"], _doc("where batches are made")] = "auto"
    processes: Annotated[int, _doc("decoder processes of a rank", ge=1)] = 1
    threads: Annotated[Count | None, _doc("decoding threads of a rank; none: its share of the cores")] = None
    prefetch: Annotated[int, _doc("slots filled ahead", ge=1)] = 2
    max_bytes: Annotated[
        int | str | None,
        _doc(
            "the most that the loader's slots may take on a rank, and as much again for held-out data: a number of bytes, or "
            '"4GiB"; none: no limit'
        ),
    ] = None
    over: Annotated[
        Literal["error", "split"],
        _doc("a batch beyond `max_bytes`: an error before its epoch begins, or parts that are accumulated as micro-batches"),
    ] = "error"


class HeldOutOptions(Struct, frozen=True, kw_only=True):
    """Data that is never trained on."""

    path: Annotated[str, _doc("data set")]
    every: Annotated[int, _doc("steps between evaluations; one more at the end. 0: only at the end", ge=0)] = 0
    batch_size: Annotated[Count | None, _doc("samples a batch over all ranks; none: that of a training micro-batch")] = None
    fields: Annotated[Transforms | None, _doc("as in `data`; none: the same")] = None


class ModelOptions(Struct, frozen=True, kw_only=True):
    """The model and its loss."""

    kind: Annotated[str, _doc("`vla`, `lm`, or `module:function` of yours, which returns (model, loss)")]
    size: Annotated[str, _doc("named size to start from: `small`, `large`")] = "small"
    options: Annotated[
        dict[str, Any], _doc("single options of the model over those of the size; of your function, its arguments")
    ] = field(default_factory=dict)


class OptimizerOptions(Struct, frozen=True, kw_only=True):
    """Optimiser and learning rate."""

    kind: Annotated[Literal["adamw", "sgd"], _doc("which")] = "adamw"
    lr: Annotated[float, _doc("largest learning rate", gt=0)] = 1e-3
    betas: Annotated[tuple[float, float], _doc("AdamW's averages, each from 0 to under 1; the first is SGD's momentum")] = (
        0.9,
        0.95,
    )
    eps: Annotated[float, _doc("AdamW's epsilon", gt=0)] = 1e-8
    weight_decay: Annotated[float, _doc("of parameters with two dimensions and more", ge=0)] = 0.01
    fused: Annotated[bool, _doc("one kernel for all parameters; without it torch's default (`foreach` on GPUs)")] = True
    schedule: Annotated[Literal["constant", "cosine", "linear"], _doc("after the warm-up")] = "cosine"
    warmup: Annotated[int, _doc("steps from 0 to the largest learning rate", ge=0)] = 100
    final: Annotated[float, _doc("part of the learning rate that is left at the last step (not `constant`)", ge=0, le=1)] = 0.1


class Config(Options, frozen=True, kw_only=True):
    """What `lftrain run` reads."""

    data: Annotated[DataOptions, _doc("the training data")]
    model: Annotated[ModelOptions, _doc("the model and its loss")]
    held_out: Annotated[HeldOutOptions | None, _doc("data for evaluation")] = None
    optimizer: Annotated[OptimizerOptions, _doc("optimiser and learning rate")] = field(default_factory=OptimizerOptions)
