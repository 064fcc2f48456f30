"""What happens to a trained model: predictions, optimization, exports."""
