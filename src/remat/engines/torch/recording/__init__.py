"""The recorder: a dispatch mode that notes ops, and which value every storage is in."""
