"""A model's tokenizer files, which the runtime hands out and front ends work with: one set of rules for both, so that
no model is loaded that no front end can use. Needs the extra of either program.
"""
