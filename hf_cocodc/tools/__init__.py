"""What commands measure, forecast, examine and draw. Nothing but the command line imports it."""
