"""One module per command: the order of its work. Options are in `settings`, entry points in
`__main__`.
"""
