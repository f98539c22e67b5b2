"""Checks the rendezvous options before a launcher waits for other hosts."""

from __future__ import annotations

from argparse import Namespace

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from paceline.errors import UsageError


def check_meeting_point(options: Namespace, hosts: int) -> None:
    """Check that with these options the launchers of up to `hosts` hosts can find each other."""
    endpoint, is_static = options.rdzv_endpoint, options.rdzv_backend == "static"
    if is_static and not 0 <= options.node_rank < hosts:
        raise UsageError(
            f"--node-rank={options.node_rank} is not in 0..{hosts - 1} (--nnodes={options.nnodes}); give each host a "
            "different number, and 0 to the first"
        )
    if not endpoint and not (is_static and options.master_addr):
        remedy = "--master-addr FIRST_HOST and --node-rank N" if is_static else "--rdzv-endpoint FIRST_HOST:PORT"
        raise UsageError(
            f"--nnodes={options.nnodes} does not say where the hosts meet; give {remedy} on each of them (127.0.0.1 if "
            "all launchers are on this one)"
        )
    try:
        parse_rendezvous_endpoint(endpoint or f"{options.master_addr}:0", 0)
    except ValueError:
        name, form = ("--rdzv-endpoint", "HOST:PORT") if endpoint else ("--master-addr", "a name or an address")
        raise UsageError(f"{name}={endpoint or options.master_addr!r} is not {form}") from None
