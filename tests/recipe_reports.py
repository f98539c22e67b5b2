"""Fields in the JSON report of every recipe besides its metrics, with their types in a fresh run."""

from __future__ import annotations

FIELDS: dict[str, type] = {
    "version": int,
    "steps": int,
    "seconds": float,
    "samples_per_second": float,
    "world_size": int,
    "gradient_bytes_per_step": int,
    "exposed_share": float,
    "replicas_identical": bool,
    "replica_sha256": list,
    "resumed_from_step": type(None),
    "restarts": int,
    "steps_redone": int,
    "rescued_from": type(None),
}
