"""Pipeline-parallel training predicted: schedules as tables, one simulator, cuts and plans.

    schedule = build("chimera", 4, 8, method="doubling")     # registry: a table of actions per worker
    print(schedule)                                          # its text; table.parse reads it back
    stages = cut_costs(layers, (0, 4, 8, 12))                # costs: what each stage takes
    simulation = simulate(schedule, stages)                  # simulate: times, bubbles
    memory(simulation)[0].peak_bytes                         # memory: every worker over time
    plan(layers, 4, 8, choices=all_choices(4, 8))            # plan: cut, simulate and rank them all

Each step is a module of that name; ``actions`` and ``order`` lie below them, ``validate`` says whether a
table can run, ``closed_forms`` and ``models`` hold what papers give to check against.
"""
