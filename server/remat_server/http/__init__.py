"""What speaks HTTP: the app, its routes, who may enter, and the page."""
