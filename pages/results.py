"""The parts of a page's right column: components by name, filled with what the page shows when it opens."""

import gradio as gr


class Results:
    """show: what to show first, by the name of the component. parts: the components, the alert and the status first."""

    def __init__(self, show: dict):
        self.show = show
        self.parts = {"alert": gr.HTML(elem_classes="plain", elem_id="alert")}
        self.words("status")

    def plot(self, name: str) -> None:
        self.parts[name] = gr.Plot(self.show[name], show_label=False, container=False, elem_id=name)

    def words(self, name: str) -> None:
        self.parts[name] = gr.HTML(self.show[name], elem_classes="plain", elem_id=name)

    def figure(self, name: str, title: str) -> None:
        """A figure under its title, and the sentence that belongs to it."""
        heading(title)
        self.plot(name)
        self.words(f"{name}_note")

    def table(self, name: str) -> None:
        self.parts[name] = gr.Dataframe(self.show[name], interactive=False, wrap=False, show_label=False, elem_id=name)

    def download(self, name: str, label: str) -> None:
        self.parts[name] = gr.DownloadButton(label, self.show[name], size="sm")


def heading(text: str) -> None:
    """The title of a figure."""
    gr.HTML(f'<h2 class="figure">{text}</h2>', elem_classes="plain")
