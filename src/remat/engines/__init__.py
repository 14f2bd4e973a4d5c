"""The only rooms that import a framework. Engines never know one another."""
