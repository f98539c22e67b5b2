"""Torch tests that are not run with Paceline's class, each with the reason."""

UNUSED = "asserts torch's error for an unused parameter or a graph that changed, which Paceline allows"
REDUCER = "inspects torch's reducer, which Paceline does not have"
LOGGING = "reads or writes the logging data of torch's reducer, which Paceline does not have"
PROFILE = "counts Gloo's collectives of torch's reducer in the profile"
PRECISION = "asserts that parameters have torch's _mp_param; test_ddp_mixed_precision tests mixed_precision"
REFUSED = "registers an optimizer inside backward, or a hook for buffers, which Paceline refuses"
TORCHS = "skipped by torch because of a failure: "

LEFT_OUT = {
    "test_ddp_unused_params_rebuild_buckets_exception": UNUSED,
    "test_ddp_control_flow_same_across_ranks": UNUSED,
    "test_ddp_control_flow_different_across_ranks": UNUSED,
    "test_ddp_multiple_nested_unused_params_error": UNUSED,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": UNUSED,
    "test_invalid_static_graph": UNUSED,
    "test_detect_ddp_is_actually_static": REDUCER,
    "test_ddp_logging_data_cpu": LOGGING,
    "test_ddp_logging_data_gpu": LOGGING,
    "test_ddp_comm_hook_logging": LOGGING,
    "test_ddp_python_error_logged": LOGGING,
    "test_sync_bn_logged": LOGGING,
    "test_static_graph_api_cpu": LOGGING,
    "test_different_graph_across_ranks": LOGGING,
    "test_skip_all_reduce_unused_parameters": LOGGING,
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": LOGGING,
    "test_verify_model_across_rank_with_logger": LOGGING,
    "test_ddp_build_debug_param_to_name_mapping": REDUCER,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": REDUCER,
    "test_ddp_profiling_autograd_profiler": PROFILE,
    "test_ddp_profiling_torch_profiler": PROFILE,
    "test_ddp_profiling_execution_trace": PROFILE,
    "test_ddp_native_mixed_precision_ignored_params": PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": PRECISION,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": PRECISION,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": PRECISION,
    "test_ddp_device": "asserts that inputs are on the GPU with the rank's number; a CPU has no number",
    "test_ddp_broadcast_buffers_deprecation_warning": "asserts that broadcast_buffers is deprecated; here it is not",
    **dict.fromkeys(
        (
            "test_ddp_apply_optim_in_backward",
            "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
            "test_ddp_apply_optim_in_backward_ignored_params",
            "test_ddp_buffer_hook_allreduce_return_future",
            "test_ddp_buffer_hook_allreduce",
            "test_ddp_broadcast_buffer_via_hook",
        ),
        REFUSED,
    ),
    "test_ddp_sync_bn_training_vs_eval": TORCHS + "pytorch/pytorch#113620",
    "test_ddp_has_finalized": TORCHS + "pytorch/pytorch#102751",
}
