"""Random changes of training images and their targets."""
