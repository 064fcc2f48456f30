"""Inference with trained models: prediction, optimization and export."""
