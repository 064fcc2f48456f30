"""The commands of `hf-vit`, a file each; the scripts are the same commands, one by one."""
