"""Compression between a server's strategy and its clients, for any framework.

A model is a mapping of names to NumPy arrays. `aqg.channel.server.Channel` is the server's end for
one model, `aqg.channel.client` a client's; both give and take bytes, and an adapter for a framework
carries them: `aqg.flower.grid` and `aqg.flower.mod` for Flower, `aqg.flare` for NVIDIA FLARE.
"""
