"""Trainer callbacks: EMA, preemption, saved state, throughput."""
