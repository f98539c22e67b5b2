"""The occupancy of a GPU's streaming multiprocessors, measured by NVML (package ``nvidia-ml-py``), Hopper and later.

NVML computes it from two samples of the device's counters: warps that were active between them, by those that the
multiprocessors could hold. It is of the whole GPU, whoever runs on it; compared ways take turns, so others are idle.
"""

from __future__ import annotations

import math
from typing import Any

import torch


class OccupancyMeter:
    """Measures spans of time on this rank's GPU; measures nothing on a CPU, and where NVML does not have the figure."""

    def __init__(self) -> None:
        self._shares: list[float] = []
        """The occupancy in each span, 0..1."""
        self._nvml: Any = None
        """The module; None where nothing is measured."""
        self._samples: list[Any] = []
        """Counters at the begin and at the end of a span; NVML writes into them."""
        if torch.cuda.is_initialized():
            self._open()

    def _open(self) -> None:
        try:
            import pynvml as nvml
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            # By its UUID, because CUDA_VISIBLE_DEVICES gives devices other numbers than NVML has.
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            if nvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
                self._samples = [nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                self._nvml = nvml
        except nvml.NVMLError:  # such as an older driver, or a container without the right
            self._nvml = None

    def begin(self) -> None:
        """Begin a span."""
        self._sample(0)

    def end(self) -> None:
        """End the span. One that is too short for NVML to have a figure is left out."""
        self._sample(1)
        if self._nvml is None:
            return
        question = self._nvml.c_nvmlGpmMetricsGet_t()
        question.version, question.numMetrics = self._nvml.NVML_GPM_METRICS_GET_VERSION, 1
        question.sample1, question.sample2 = self._samples
        question.metrics[0].metricId = self._nvml.NVML_GPM_METRIC_SM_OCCUPANCY
        try:
            metric = self._nvml.nvmlGpmMetricsGet(question).metrics[0]
        except self._nvml.NVMLError:
            return
        if metric.nvmlReturn == self._nvml.NVML_SUCCESS and math.isfinite(metric.value):
            self._shares.append(metric.value / 100)

    def mean(self) -> float | None:
        """Return the mean of all spans, 0..1; None where none was measured."""
        return sum(self._shares) / len(self._shares) if self._shares else None

    def _sample(self, number: int) -> None:
        if self._nvml is None:
            return
        try:
            self._nvml.nvmlGpmSampleGet(self._device, self._samples[number])
        except self._nvml.NVMLError:
            self._nvml = None
