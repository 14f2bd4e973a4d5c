"""The memory model: geometry of tensors, values of storages, memory shared with other libraries."""
