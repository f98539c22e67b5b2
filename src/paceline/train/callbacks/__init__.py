"""Callbacks: their protocol, how they are called, and those that come with Paceline."""
