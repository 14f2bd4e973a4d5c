"""Which bytes a tensor stands for: storages, views, values, memory shared with others."""
