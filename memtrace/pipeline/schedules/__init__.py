"""Pipeline schedules as tables: construction, registry, dependencies and validation."""
