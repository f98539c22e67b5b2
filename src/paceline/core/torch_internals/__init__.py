"""Every private name of torch that Paceline relies on, each with a contract test.

Rooms, each above those that it imports:

    autograd · distributed
    amp · compile · data · fake_tensors · optimizer_hooks · profiler · tensors · versions
"""
