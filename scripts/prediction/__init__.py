"""What predict.py does with images and with the answers of models; needs nothing but transformers, PIL and numpy."""
