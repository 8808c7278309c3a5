def footprint(p,s): raise NotImplementedError
