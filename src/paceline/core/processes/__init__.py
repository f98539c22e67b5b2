"""Who the ranks are, and how they find each other.

Rooms, each above those that it imports:

    consensus · rank_lookup
    world
    private_store
    store_epochs
    control_groups · gpus · missing_ranks · nccl_communicators · schedulers
"""
