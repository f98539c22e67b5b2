"""Shared memory between the ranks of one host: arena, handshake, doorbells, engine, collectives."""
