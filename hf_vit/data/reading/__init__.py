"""Functions that all formats share: files, splits, classes, tables of objects, and recognition of formats."""
