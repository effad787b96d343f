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
