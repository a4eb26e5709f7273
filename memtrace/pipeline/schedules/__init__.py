"""Pipeline schedules as tables of actions: generators, registry, dependencies and validation."""
