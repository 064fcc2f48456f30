"""Random augmentation of training images and their targets."""
