"""A host that runs some forwards past the hooks."""


class Blinded:
    """Takes the hooks of the decoder away for the forwards numbered `lost`, and gives them back."""

    def __init__(self, model, lost):
        self.model, self.lost, self.n, self.kept = model, lost, 0, {}

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self.before, with_kwargs=True)
        return self

    def before(self, module, args, kwargs):
        hooks = self.model.get_decoder()._forward_pre_hooks
        hooks.update(self.kept)
        if self.n in self.lost:
            self.kept = dict(hooks)
            hooks.clear()
        self.n += 1

    def __exit__(self, *error):
        self.handle.remove()
        self.model.get_decoder()._forward_pre_hooks.update(self.kept)
