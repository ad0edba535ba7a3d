"""One contest: recipes on tasks, by every byte and by rounds until a goal is reached.

`tasks` says what is learned and what the goal is, `search` what is tried, `plan` what runs next,
`measure` what counts, and `table` and `picture` show it.
"""
