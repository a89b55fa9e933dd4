"""Ratios that were measured by hand before the harness was there, beside those of records."""

from __future__ import annotations

from typing import Any

BASES = {"W1": "torch_simplejpeg", "W2": "torch_simplejpeg", "W3": "bare_calls"}
"""The subject that all are compared with: for tokens a bare gather, which made 885,000 sequences/s by hand."""
SAMPLES = {"W1": "ImageNet", "W2": "ImageNet", "W3": "64 M ids"}
RATIOS: dict[str, dict[str, tuple[float, ...]]] = {
    "W1": {
        "torch_pil": (0.72,),
        "webdataset_": (0.91,),
        "streaming_": (0.76,),
        "litdata_": (0.92,),
        "dali_cpu": (0.90, 0.94),
        "spdl_": (0.49,),
        "grain_": (0.72,),
        "ffcv_": (1.07,),
    },
    "W2": {
        "torch_pil": (0.88,),
        "webdataset_": (1.01,),
        "streaming_": (0.92,),
        "litdata_": (1.10,),
        "dali_cpu": (0.99,),
        "spdl_": (0.57,),
        "grain_": (0.89,),
        "ffcv_": (1.79,),
    },
    "W3": {
        "torch_memmap": (0.193,),
        "litdata_": (0.0695,),
        "streaming_": (0.0033, 0.0051),
        "grain_": (0.0037,),
    },
}
"""Rates over the rate of :data:`BASES`, by workload; several where it was measured more than once."""
VARIANTS = {"torch_pil": ("torch_pillow", "torch DataLoader + plain pillow"), "grain_": ("grain_defaults", "Grain, defaults")}
"""Subjects that are told below another one, where a record has them, and their titles."""


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def _ratio(record: dict[str, Any], label: str) -> str:
    found = [record["results"].get(name, {}).get("samples_s") for name in (label, BASES[record["options"]["workload"]])]
    return _short(found[0]["median"] / found[1]["median"]) if all(found) else ""


def table(records: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row a subject, the ratio by hand, then those of records of one workload, by name, of their medians."""
    workload = next(iter(records.values()))["options"]["workload"]
    rows = [
        f"| {workload} | by hand, {SAMPLES[workload]} |{''.join(f' `{name}` |' for name in records)}",
        f"| --- | --- |{' --- |' * len(records)}",
    ]
    for label, ratios in RATIOS[workload].items():
        title = next((one["results"][label]["title"] for one in records.values() if label in one["results"]), label.rstrip("_"))
        if workload == "W3":
            title = title.partition(" + simplejpeg")[0]
        rows.append(
            f"| {title} | {' to '.join(map(_short, ratios))} |"
            + "".join(f" {_ratio(record, label)} |" for record in records.values())
        )
        if label in VARIANTS:
            other, name = VARIANTS[label]
            found = [_ratio(record, other) for record in records.values()]
            if any(found):
                rows.append(f"| {name} | |{''.join(f' {ratio} |' for ratio in found)}")
    return "\n".join(rows)
