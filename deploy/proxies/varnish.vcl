# /etc/varnish/default.vcl: REST. Varnish knows neither TLS nor gRPC: both are for what is beside it.
vcl 4.1;

backend xlaserve {
    .host = "127.0.0.1";
    .port = "8000";
    # A stream says nothing for a while.
    .first_byte_timeout = 1h;
    .between_bytes_timeout = 1h;
    .probe = {
        .request = "GET /v2/health/ready HTTP/1.1" "Host: localhost" "Connection: close";
        .interval = 5s;
        .initial = 1;
        .threshold = 1;
    }
}

sub vcl_recv {
    # Varnish adds the client to what it has sent itself.
    set req.http.X-Forwarded-For = client.ip;
    set req.http.X-Forwarded-Proto = "http";
    unset req.http.X-Forwarded-Prefix;
    unset req.http.Forwarded;
    # Also below /ml/
    if (req.url ~ "^/ml/") {
        set req.url = regsub(req.url, "^/ml/", "/");
        set req.http.X-Forwarded-Prefix = "/ml";
    }
}
