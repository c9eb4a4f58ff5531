"""One real language model, adapted here: its data, its runs, and the claims about them."""
