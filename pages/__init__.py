"""One module per page of the app: widgets and wording only, no torch and no arithmetic."""
