"""Gradio's theme for all pages: system fonts, so that nothing is fetched, and the colour tokens of assets/style.css."""

import gradio as gr

TOKENS = {
    "body_background_fill": "page",
    "background_fill_primary": "surface",
    "background_fill_secondary": "sunken",
    "body_text_color": "text",
    "body_text_color_subdued": "quiet",
    "block_background_fill": "surface",
    "block_border_color": "line",
    "block_label_text_color": "quiet",
    "block_title_text_color": "text",
    "block_info_text_color": "quiet",
    "border_color_primary": "line",
    "input_background_fill": "surface",
    "input_border_color": "line",
    "input_border_color_focus": "focus",
    "slider_color": "ink",
    "color_accent": "ink",
    "button_primary_background_fill": "ink",
    "button_primary_background_fill_hover": "quiet",
    "button_primary_border_color": "ink",
    "button_primary_text_color": "on-ink",
    "button_secondary_background_fill": "sunken",
    "button_secondary_background_fill_hover": "line",
    "button_secondary_text_color": "text",
    "button_cancel_background_fill": "sunken",
    "button_cancel_background_fill_hover": "line",
    "button_cancel_text_color": "text",
    "link_text_color": "dense",
    "checkbox_background_color_selected": "ink",
    "checkbox_label_background_fill": "surface",
    "checkbox_label_background_fill_selected": "sunken",
    "checkbox_label_border_color": "line",
    "checkbox_label_text_color": "text",
    "checkbox_label_text_color_selected": "text",
}


def build_theme() -> gr.themes.Base:
    """The tokens decide about light and dark, so both get the same names."""
    theme = gr.themes.Base(
        font=("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"),
        font_mono=("ui-monospace", "SFMono-Regular", "Menlo", "monospace"),
        radius_size=gr.themes.sizes.radius_md,
        spacing_size=gr.themes.sizes.spacing_md,
    )
    colours = {name: f"var(--pop-{token})" for name, token in TOKENS.items()}
    for suffix in ("", "_dark"):
        known = {name + suffix: value for name, value in colours.items() if hasattr(theme, name + suffix)}
        theme.set(**known)
    return theme.set(input_border_width="1px", input_border_width_dark="1px", block_title_text_weight="600")


THEME = build_theme()
