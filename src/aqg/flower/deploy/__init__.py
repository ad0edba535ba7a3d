"""Deployments on one machine: processes, their supervision, certificates, workers."""
