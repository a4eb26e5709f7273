"""Pipeline-parallel training: schedules, simulation of time and memory, partitions, plans and recorded pipelines.

    schedule = build_schedule("chimera", 4, 8, method="doubling")
    print(schedule)                                      # the text form; parse_schedule reads it
    stages = partition_costs(layers, (0, 4, 8, 12))      # what each stage costs
    simulation = simulate_schedule(schedule, stages)     # times and bubbles
    simulate_memory(simulation)[0].peak_bytes            # memory of every worker over time
    plan_pipeline(layers, 4, 8, choices=all_schedule_choices(4, 8))

Modules:

- ``schedules``: schedules as tables of actions: generators, registry, dependencies, validation.
- ``costs``: costs of layers, stages and messages; ``paper_models`` describes the models of the papers.
- ``memory_rules``: what a worker keeps in memory, and which action allocates and frees it.
- ``simulation``: times and memory of a schedule; ``closed_forms`` has the formulas of the papers for the tests.
- ``partition``: how to split a model into stages (uses ``layer_ranges`` and ``peak_moments``).
- ``plan``, ``search``: rank schedules, and data-parallel degrees with them; ``plan_report`` is the printed result, and
  ``plan_assumptions`` states what it rests on.
- ``layer_costs``: layer costs from a trace (uses ``layer_passes`` and ``layer_state``); ``microbatch_costs``: costs of
  other micro-batch sizes.
- ``recorded``, ``measured``: the actions, stages and workers of a recorded pipeline; ``recorded_versions``: its weight
  versions; ``recorded_syncs``: its gradient synchronization.
- ``prediction``: a recorded pipeline predicted from a single-process trace.
"""
