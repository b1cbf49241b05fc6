"""Parameters whose next values are on their way, and who reads them whole."""
