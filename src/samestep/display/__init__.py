"""What people look at: tables in the terminal, and pictures of layouts and schedules.

`tables` (a training's result, a proof, a profile), `checkpoints`, `hosts`; `layout` finds who holds what, which it
shows as a table and `layout_svg` as a picture; `plan` and `plan_page` show plans; `schedule_svg` draws a pipeline's
schedule, and `curves_svg` curves over axes. `console` is where tables are printed to.
"""
