"""Quality, speed and cost of every mode and baseline on the same work (``rapid eval``).

A *task* is one YAML file: where its items come from, how they are asked and scored, and which
systems and conditions are compared. A *run* answers every (item, system, condition) once, in
process or against a server, and keeps one JSON line each; reports are made from those lines alone.

::

    loaders -> items -> prompting (corruption) -> in_process | over_http -> metrics -> results
    results -> run_results (statistics, flops) -> report, plots
"""
