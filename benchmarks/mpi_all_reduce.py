"""Times Open MPI's all-reduce: ``mpirun -n 2 python mpi_all_reduce.py BYTES REPEAT``; prints seconds per call."""

from __future__ import annotations

import sys
import time
from array import array

from mpi4py import MPI


def main() -> None:
    size, repeat = int(sys.argv[1]), int(sys.argv[2])
    world = MPI.COMM_WORLD
    data = array("f", [1.0]) * (size // 4)
    buffer = [memoryview(data), MPI.FLOAT]
    for _ in range(2):
        world.Allreduce(MPI.IN_PLACE, buffer)
    world.Barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        world.Allreduce(MPI.IN_PLACE, buffer)
    seconds = world.allreduce((time.perf_counter() - start) / repeat, op=MPI.MAX)
    if world.Get_rank() == 0:
        print(seconds)


if __name__ == "__main__":
    main()
