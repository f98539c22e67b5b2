"""Validates the example manifests against the Kubernetes and Kubeflow Trainer schemas; no cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="install the extra 'engines' for the schemas")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="install the extra 'engines' for the schemas")
pytestmark = pytest.mark.engines  # not in the extra "test", because the schemas take 108 MB

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
DOCUMENTS = {
    document["kind"]: document
    for file in sorted(MANIFESTS.glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text("utf-8"))
}


def unlike(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Return the paths at which `actual` lacks or changes a part of `expected`."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return [place for key, value in expected.items() for place in unlike(value, actual.get(key), f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        return [
            place
            for number, (one, other) in enumerate(zip(expected, actual, strict=True))
            for place in unlike(one, other, f"{path}[{number}]")
        ]
    return [] if expected == actual else [path]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_exists_in_the_kubeflow_trainer_schema(kind: str) -> None:
    document = DOCUMENTS[kind]
    model = getattr(models, f"TrainerV1alpha1{kind}").from_dict(document)
    assert not unlike(document, model.to_dict())  # fields unknown to the schema are dropped


def test_jobs_in_the_runtime_are_valid_for_kubernetes() -> None:
    [replicated] = DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    job["metadata"] = {"name": replicated["name"], **job["metadata"]}
    latest = kubernetes_validate.latest_version()
    checked = kubernetes_validate.validate(job, latest, strict=True)  # raises for an invalid job
    assert latest.startswith(f"{checked}.")
