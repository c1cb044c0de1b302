"""Output for people: tables in the terminal, pages of HTML, and pictures of layouts and schedules.

Read `tables` first, the one way to print a table; packages that come later build their rows and print them by it.
`data` shows how a job reads its samples. `results` (a training's metrics, what its ranks held, its profile),
`proofs`, `checkpoints` and `hosts` print what the packages before this one find. `layout` finds who holds what, which
it shows as a table and `layout_svg` as a picture; `plan` and `plan_page` show plans, `proofs_page` proofs,
`steps_figure` their differences by step; `schedule_svg`
draws a pipeline's schedule, and `curves_svg` curves over axes. `page` has the parts of a page of HTML in both
languages, tables among them. A table that is in the terminal and in a page has its columns declared once, by
`columns`.
"""
