"""Access to private state for tests that cannot check their claim through the public API.

Tests use private names only through this file, so only this file changes when code moves.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

from paceline.ddp import DistributedDataParallel

_NAMES = {
    "checkpoint.due_saves": "DAY_S DueSaves automatic_interval",
    "checkpoint.persist_rescued": "keep",
    "checkpoint.rank_states": "OwnStates StepBarrier carry_over",
    "checkpoint.recovery": "Contents DESTINATION Recovery",
    "checkpoint.registered": "Registered",
    "checkpoint.run_folder": "RunFolder",
    "checkpoint.safetensors_file": "read_specs",
    "checkpoint.signals": "Interrupts StopRequests",
    "checkpoint.state_codec": "Encoder STORABLE Unencodable decode",
    "checkpoint.step_boundary": "Boundary",
    "checkpoint.step_names": "step_name",
    "comm.board": "Board",
    "comm.forking": "keep_in_children",
    "comm.gloo": "connect_gloo",
    "comm.handshake": "Peer",
    "comm.own_group": "open_own_group",
    "comm.process_group": "PacelineProcessGroup",
    "comm.schedules": "Model NAMES Schedule bounds build elements features holdings",
    "comm.shm_arena": "Arena HEADER_BYTES",
    "comm.shm_collectives": "SMALL_BYTES STAGE_BYTES",
    "comm.shm_engine": "Engine",
    "comm.topology": "Refused SPLIT memory_identity",
    "comm.work": "Handle Runner",
    "compression.low_precision": "CHUNK",
    "compression.powersgd": "orthonormal product",
    "core.black_box": "BlackBox FOLDER PHASES Snapshot path_of=black_box_path_of read_box",
    "core.data_position": "Origin",
    "core.digests": "PIECE quick_digest tensor_digest weights_sha256",
    "core.host": "busy_seconds is_running processor_seconds",
    "core.job_directory": "JobFolder JobNote PARENT read_note running_jobs",
    "core.messages": "digits",
    "core.rank_lookup": "NAMES=rank_lookup_NAMES",
    "core.rank_page": "SIZE",
    "core.rng": "derive_seed rng_state seed_all set_rng_state",
    "core.schedulers": "PORTS adopt adopted",
    "core.spans": (
        "BACKWARD CHECKPOINT COLLECTIVE CONTROL DATA_WAIT DONE FORWARD GRADIENT LAUNCH OPTIMIZER OUTER_STEP REDUCE "
        "Recorder SENT Span WAIT recorder"
    ),
    "core.stacks": "place_in",
    "core.step_progress": "BEFORE RESCUE RESTARTS SPARE STEPS StepRecord job_folder key_of record_path records_in",
    "core.stores": "is_one_host path_of=stores_path_of",
    "core.torch_distributed": "get_default_store get_known_groups is_sharded whole_of",
    "core.torch_elastic": "OPTIMIZERS_NEED leave_together starting_ranks_with",
    "core.torch_internals": "GraphTask queue_callback",
    "core.unwrapping": "AveragingWrapper",
    "core.virtual_ranks": "seed_of_slice",
    "core.world": "TIMEOUT _place check_own_gpu choose_gpu current gpu_name",
    "data.balance": "split_by_cost split_by_padded_cost",
    "data.dataset_digest": "outline_digest",
    "data.slices": "batch_count shares_by_speed slice_bounds",
    "ddp.arrivals": "copy_into grads_are_none",
    "ddp.backward": "tensors_in",
    "ddp.buckets": "Bucket arrival_order assign overlap",
    "ddp.channel": "ExposedTime MOST_PENDING SAMPLED TEST_HOST_CHANNEL open_channel open_host_group",
    "ddp.comm_hook": "GradBucket",
    "ddp.control_block": "ControlBlock Status StatusDigest tail_width",
    "ddp.exchange": "QuietSteps USUAL_STEPS",
    "ddp.extensions": "GraphCapture unused_message",
    "ddp.frozen_step": "FrozenStep TEST_FROZEN",
    "ddp.joined_steps": "Event Message encode event_number decode=joined_steps_decode",
    "ddp.ledger": "Ledger",
    "ddp.options": "capacities",
    "ddp.replica_check": "drift",
    "ddp.step_guard": "StepGuard",
    "ddp.weights": "LOOKS MEAN UNWEIGHTED WEIGHTED compute_scale",
    "launch.agent": "launch",
    "launch.failure_record": "Record blamed_by may_pass",
    "launch.fork_client": "ForkServer",
    "launch.hang_detection": "RankView hanging waiting_call",
    "launch.hook.run_module": "module_command",
    "launch.job": "Job LOOPBACK black_boxes loopback_store resolve_nproc title_of torchrun_environment",
    "launch.job_report": "JobReport exception_of failure_of",
    "launch.options": "Supervision",
    "launch.rank_processes": "RankProcesses",
    "launch.restart_policy": "GPUS Restarts",
    "launch.root_cause": (
        "End NOT_BEGUN State cause doings failures headline identity raised remarks report state_of usage"
    ),
    "launch.signals": "HELD_BACK",
    "launch.verdict": "Cause Change EARLY_S Failure LIMIT Past Slots Reached Verdict verdict",
    "optim.islands": "Islands",
    "optim.sharding": "cut_evenly deal_out",
    "planner.calibration": "ASSUMED Calibration MEASURED PUBLISHED SPEEDS",
    "planner.critical_batch": "NoiseScale verdict=critical_batch_verdict estimate trade_off trainings",
    "planner.goodput": "best_interval goodput",
    "planner.hardware": ("Cluster GBIT Link UNKNOWN between_link device device_or_unknown inside_link links table"),
    "planner.outer_steps": "island_step outer_steps",
    "planner.predictions": (
        "Layer Workload backward_timeline described=described_step effects equal_layers Job=predictions_Job simulate"
    ),
    "planner.profiles": "Profiled fit from_profiles from_summary",
    "planner.replica_memory": "ReplicaMemory",
    "profiler.__main__": "stop=stop_profiled",
    "profiler.advice": "Advice",
    "profiler.analyze": "Report read_facts report_of summary",
    "profiler.chrome_trace": "trace_events",
    "profiler.facts": "Facts is_lasting late_since plan_of",
    "profiler.host_load": (
        "CollectorPauses HostLoad busy_seconds=host_load_busy_seconds load_of neighbours own_seconds quota"
    ),
    "profiler.measurements": "DeviceTimes Forwards GradientNorms LAG",
    "profiler.operator_table": "Operator OperatorTable operators_in overlap_of_kernels read_trace tabulate",
    "profiler.page": "page",
    "profiler.profiling": "RESULTS write_results",
    "profiler.rank_file": (
        "KILLED RankRecord path_of FOLDER=rank_file_FOLDER read_ranks trace_of write_facts write_steps"
    ),
    "profiler.recorder": "Session",
    "profiler.stack_samples": "StackSampler between_spans function_of",
    "profiler.step_breakdown": (
        "account bucket_times detailed_steps find_bubbles gradient_times mean_of reduced_and_hidden"
    ),
    "profiler.steps": "MEETING MOST Meeting Step bound_offset cut_into_stretches offset_at seconds_by_part shared",
    "testing.assertions": "gradient_difference tensor_difference weight_difference",
    "testing.pool": "Ranks TIMEOUT_S fork_server plain_start_method preload run_ranks",
    "tools.bench.bench_command": "OPS parse_ops parse_sizes",
    "tools.bench.measure": "OURS take_turns",
    "tools.bench.report": "Row document=bench_document",
    "tools.checkpoint_files": "export",
    "tools.compare.measured_run": "TURN Turns",
    "tools.compare.modes": "MODES Way choose_ways",
    "tools.compare.report": (
        "figures notes COLUMNS=report_COLUMNS document=compare_document Row=report_Row weights_difference"
    ),
    "tools.explain.buckets": "BANDWIDTH LATENCY",
    "tools.explain.collectives": "BEFORE_2_13 Collective outcome states",
    "tools.explain.drawing": "Cell",
    "tools.explain.explain_command": "KNOWN MOST_RANKS scenes",
    "tools.explain.scene": "Frame page=scene_page sheet",
    "tools.main": "main",
    "tools.memory_estimate.activations": "Activations Batch activations_of",
    "tools.memory_estimate.models": "BuiltModel",
    "tools.notebook.cell_parser": "Start parsed_start pulled ranks_in routed",
    "tools.notebook.execution": "Conversation Wait wait_in",
    "tools.notebook.magics": "RankMagics",
    "tools.notebook.output": "Folding PATIENCE_S",
    "tools.notebook.processes": "Process Processes",
    "tools.notebook.rank": "Channel Rank",
    "tools.plan.report": "Outlook Plan document look_ahead notes=report_notes trainings_table",
    "tools.profile_command": "ProfileSettings parts_table print_summary",
    "tools.program": "option",
    "tools.recipes.configs": "DEFAULT_MODEL DigitsConfig LmConfig MrpcConfig",
    "tools.recipes.datasets": "COLUMNS read_folder",
    "tools.recipes.mrpc": "train_mrpc",
    "tools.run_options": "add_own_options",
    "tools.top": "ENDED JobView RUNNING RankStatus STARTING choose describe find_straggler",
    "train.checkpoints": "DataIdentity Saves fingerprint",
    "train.loggers": "Loggers ProgressDisplay",
    "train.metrics": "LossAverage",
    "train.run": "RunState",
}
"""The names that tests use of each internal module; ``name=alias`` if another module has the same name."""
_MODULES = (
    "checkpoint.captures checkpoint.checkpointer checkpoint.due_saves checkpoint.manifest checkpoint.rank_states "
    "checkpoint.restore checkpoint.run_folder checkpoint.safetensors_file checkpoint.saving checkpoint.state_codec "
    "checkpoint.step_boundary checkpoint.step_folders comm.gloo comm.handshake comm.own_group comm.shm_engine "
    "compression.compressor compression.pipeline core.black_box core.consensus core.device_streams core.failpoints "
    "core.failure_callbacks core.job_directory core.missing_ranks core.nccl_communicators core.stores "
    "core.strict_json core.torch_distributed core.torch_elastic core.torch_internals core.world ddp.arrivals "
    "ddp.channel ddp.extensions ddp.finisher ddp.local ddp.reducer ddp.wrapper launch.agent launch.failure_record "
    "launch.fork_client launch.fork_server=launch_fork_server launch.guard launch.hang_detection launch.job "
    "launch.output launch.rank_processes launch.restart_policy launch.signals launch.stack_dump "
    "launch.verdict=launch_verdict nn.sync_batch_norm optim.sharding profiler.advice profiler.rank_file "
    "profiler.recorder=profiler_recorder profiler.stack_samples profiler.step_breakdown profiler.step_parts "
    "tools.bench.measure tools.checkpoint_files tools.explain.bubble tools.explain.buckets tools.explain.collectives "
    "tools.hub tools.main=tools_main tools.memory_estimate.footprints tools.memory_estimate.heap "
    "tools.recipes.commands tools.recipes.datasets tools.recipes.lm tools.recipes.mrpc tools.run_command "
    "tools.run_options train.checkpoints train.loop train.training_step "
)
"""The internal modules whose attributes tests read or replace; ``module=alias`` as above."""


def _homes() -> Iterator[tuple[str, str, str]]:
    """Yield the alias, module and name of everything in the tables; the name is empty for a module."""
    for module, names in _NAMES.items():
        for name, _, alias in (entry.partition("=") for entry in names.split()):
            yield alias or name, module, name
    for module, _, alias in (entry.partition("=") for entry in _MODULES.split()):
        yield alias or module.rpartition(".")[2], module, ""


_HOMES = {alias: (f"paceline.{module}", name) for alias, module, name in _homes()}


def __getattr__(alias: str) -> Any:
    """Import what a test asks for, and no other module."""
    if alias not in _HOMES:
        raise AttributeError(f"tests/insides.py has no {alias!r}; name its module there")
    module, name = _HOMES[alias]
    return getattr(import_module(module), name) if name else import_module(module)


keep_versions: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
"""Context in which writes to the given tensors do not increase their autograd version counters."""


def engine_of(model: DistributedDataParallel) -> Any:
    """Return the engine that averages the gradients of `model`; on several ranks, its reducer."""
    return model._engine


def storage_of(model: DistributedDataParallel) -> Any:
    """Return the buckets of `model`."""
    return engine_of(model).buckets


def channel_of(model: DistributedDataParallel) -> Any:
    """Return the channel that carries the gradients of `model`."""
    return model._connection.channel


def backward_of(model: DistributedDataParallel) -> Any:
    """Return the running or unsettled backward of `model`, or None between backwards."""
    return engine_of(model).backward


@contextmanager
def stand_in_gpu(model: DistributedDataParallel) -> Iterator[None]:
    """Give the parts of `model` that ask for its device a GPU that has passed every event and captures nothing."""
    exposed, extensions = engine_of(model).exposed_time, engine_of(model).extensions
    event = SimpleNamespace(record=lambda: None, query=lambda: True, elapsed_time=lambda _end: 0.0)
    exposed.device, exposed.of_host, exposed._event = SimpleNamespace(type="cuda"), nullcontext(), lambda: event
    for extension in extensions.all:
        if hasattr(extension, "_device"):  # GraphCapture
            extension._device = exposed.device
    extensions.is_stale = True
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", _is_not_capturing):
        yield


def _is_not_capturing() -> bool:
    return False


def pieces_in_use(group: Any) -> int:
    """Return the number of pieces of a rank's shared memory that are tensors, not copies exposed by collectives."""
    return len(group._collectives.engine.arena._used) - len(group._collectives._places._used)


def under_way(channel: Any) -> int:
    """Return the number of collectives of `channel` that were launched but not yet waited for."""
    return int(channel.outstanding.count)


def flip_bit(board: Any, bit: int) -> None:
    """Flip a bit of the word that this rank has posted last, in the memory that all ranks read."""
    places = import_module("paceline.comm.board")._PLACES
    board._own[places[board._engine.reports & 1]] ^= 1 << bit


def count_reports(board: Any, reports: int) -> None:
    """Continue as if this rank had posted that many reports."""
    board._engine.reports = reports


def has_hook(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` has a post-accumulate hook."""
    return bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def metadata_of(state: Any) -> Any:
    """Return torch's metadata of a state dict, which holds version numbers."""
    return state._metadata


def step_in_backward(kind: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Make optimizers of `kind` step over `parameters` inside backward, through torch's private function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import loads TorchScript
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, list(parameters), {"lr": lr})
