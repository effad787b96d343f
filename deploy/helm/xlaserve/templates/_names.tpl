{{- define "xlaserve.name" -}}
{{- if contains "xlaserve" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-xlaserve{{ end -}}
{{- end }}

{{- define "xlaserve.selector" -}}
app.kubernetes.io/name: xlaserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "xlaserve.labels" -}}
{{ include "xlaserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "xlaserve.account" -}}
{{ .Values.serviceAccount.existing | default (include "xlaserve.name" .) }}
{{- end }}

{{- /* The port of /metrics and of probes: a picker reads metrics where requests are served. */}}
{{- define "xlaserve.metrics" -}}
{{- if .Values.inferencePool.enabled }}http{{ else }}metrics{{ end -}}
{{- end }}
