"""Block formats: a file each, with how one superblock is decoded; `table.py` lists them."""
