"""The manifests of the examples against the schemas of Kubernetes and of Kubeflow Trainer; no cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="install the extra 'engines' for the schemas")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="install the extra 'engines' for the schemas")
pytestmark = pytest.mark.engines  # and not of the extra "test", as the schemas of all versions take 108 MB

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
DOCUMENTS = {
    document["kind"]: document
    for file in sorted(MANIFESTS.glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text("utf-8"))
}


def unlike(expected: Any, found: Any, path: str = "") -> list[str]:
    """The paths at which `found` lacks or changes something of `expected`."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return [place for key, value in expected.items() for place in unlike(value, found.get(key), f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            place
            for number, (one, other) in enumerate(zip(expected, found, strict=True))
            for place in unlike(one, other, f"{path}[{number}]")
        ]
    return [] if expected == found else [path]


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_every_field_is_one_that_the_schema_of_kubeflow_trainer_has(kind: str) -> None:
    document = DOCUMENTS[kind]
    model = getattr(models, f"TrainerV1alpha1{kind}").from_dict(document)
    assert not unlike(document, model.to_dict())  # a field that the schema does not have is dropped


def test_the_jobs_inside_the_runtime_are_valid_for_kubernetes() -> None:
    [replicated] = DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    job["metadata"] = {"name": replicated["name"], **job["metadata"]}
    latest = kubernetes_validate.latest_version()
    checked = kubernetes_validate.validate(job, latest, strict=True)  # raises for an invalid job
    assert latest.startswith(f"{checked}.")
