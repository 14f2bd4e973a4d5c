"""Record and replay, once for all engines: no framework is imported here."""
